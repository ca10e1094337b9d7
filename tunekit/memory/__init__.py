"""Activation checkpointing and offloading."""
