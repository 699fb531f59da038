"""Keeps files of pictures and videos in a directory that frontends may share, for as long as the settings say."""
