"""Mixture of experts in Triton."""
