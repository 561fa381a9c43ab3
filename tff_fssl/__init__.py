"""Federated semi-supervised learning on TensorFlow Federated."""

__version__ = '0.1.0'
