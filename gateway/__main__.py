"""`python -m gateway` is the `warmfront` command."""

from gateway.cli.main import main

raise SystemExit(main())
