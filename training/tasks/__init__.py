"""What is learned: next tokens, preferences, a teacher's predictions."""
