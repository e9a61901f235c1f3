"""Histories of users: reading, generating, batching."""
