"""Tools: how they are offered to a model, and how its calls are read. Independent of any one API.

prompt          the conversation as the model's chat template takes it
dialects        how model families write calls: a table of forms
form            what a form is; json_calls, named_json, pythonic, tagged and silent are the forms
source          text that comes in pieces, as forms read it
pieces          what an answer is made of once it is read
parser          reads calls out of a text, with the forms of its model
choice_parser   reads one choice's tokens
grammars        the grammar that an answer follows
"""

from twostroke.server.tools.grammars import grammar
from twostroke.server.tools.prompt import described, prompt_messages

__all__ = ["described", "grammar", "prompt_messages"]
