"""What all rungs stand on: errors, files, options, a default loss, and torch's private parts."""
