from tests.identity.law import main

if __name__ == "__main__":
    raise SystemExit(main())
