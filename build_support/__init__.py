"""Build code beyond setuptools: kernel embedding, the macOS cross build and its checks."""
