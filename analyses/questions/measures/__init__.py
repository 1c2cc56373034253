"""The question `measures`: does another distance than L1 change what is concluded."""
