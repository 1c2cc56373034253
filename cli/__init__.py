"""One file per subcommand: parse, call one function, print, save."""
