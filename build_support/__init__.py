"""Build code beyond setuptools: kernel embedding, pinned wheels, the macOS cross build and its checks."""
