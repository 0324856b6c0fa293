"""The command `torch-marlin-metal`: `main.py` starts it, and `app.py` lists its commands, one file each."""
