"""The command `torch-marlin-metal`. `main.py` starts the command, and `app.py` lists the subcommands, one file each."""
