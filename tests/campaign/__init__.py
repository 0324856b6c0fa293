"""A campaign that looks for crashes, hangs and wrong results: `make campaign MINUTES=10`. docs/use/reliability.md explains it."""
