"""Live servers, watched from outside. The room is laid out; a later version furnishes it."""
