"""The page that a browser gets at `/`: a chat, and beside it the engine at work.

routes.py   the page's files, what they ask for, and how browsers are told to treat them
feed.py     the engine's work as server-sent events, encoded once for all watchers
static      the page itself: HTML, a stylesheet and modules, as they are sent; nothing builds them
"""
