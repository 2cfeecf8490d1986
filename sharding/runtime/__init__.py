"""How ranks begin, agree, fail and end."""
