"""What each verb of the command line does; `cli.py` only parses and calls these."""
