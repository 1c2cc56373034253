"""Planted mistakes: of small changes drawn by seed in the inner rooms, how many does a test catch?"""
