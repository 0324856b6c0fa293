"""Modules that make other packages use the operators. Import the module for your package explicitly."""
