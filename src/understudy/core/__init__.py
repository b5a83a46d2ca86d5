"""What every other package uses: errors, names, settings, logs and codecs."""
