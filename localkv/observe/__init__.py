"""Live servers, watched from outside: what they answer, over time, and under load."""
