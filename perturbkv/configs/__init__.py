"""What a user chooses, frozen and validated where it is made."""
