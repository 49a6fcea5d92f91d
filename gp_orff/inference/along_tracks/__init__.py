"""What a posterior tells of the noise that readings of a track share."""
