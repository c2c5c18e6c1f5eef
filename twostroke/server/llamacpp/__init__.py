"""llama.cpp's own API, as far as editors and small clients use it beside OpenAI's.

schemas   what clients send      answers   what they get      routes   the endpoints
"""
