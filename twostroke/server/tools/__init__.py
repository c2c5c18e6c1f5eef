"""Tools: how they are offered to a model, and how its calls are read. Independent of any one API.

prompt          renders a conversation with tools for the model's chat template
dialects        how model families write calls: a table of formats, and which of them a model uses
text_buffer     the text that has arrived, and the interface of a format that reads it; there are
                json_calls      objects with a name and arguments, or behind a name in markup
                pythonic        Python's calls
                tagged          parameters between tags, and markup that is neither call nor text
parser          parses calls out of a text, in the formats of its model, and one choice's tokens
grammars        the grammar that constrains an answer which may call tools
"""

from twostroke.server.tools.grammars import grammar
from twostroke.server.tools.prompt import describe_tools, prompt_messages

__all__ = ["describe_tools", "grammar", "prompt_messages"]
