def add_parser(subparsers):
    raise NotImplementedError
