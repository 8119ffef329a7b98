"""The doors to the inference engines: load, plan, decode, and understand what they print."""
