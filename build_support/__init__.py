"""What building needs beyond setuptools: pinned wheels, the macOS cross build."""
