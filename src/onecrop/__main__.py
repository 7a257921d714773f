from onecrop.cli import main

raise SystemExit(main())
