"""Test-Time Training for PyTorch."""
