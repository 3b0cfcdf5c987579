"""The rules of other routers, for honest comparison in replay."""
