"""Modules that make other packages use the operators. Import the one you need by name."""
