"""What is learned beside next tokens: preferences, and a teacher's predictions."""
