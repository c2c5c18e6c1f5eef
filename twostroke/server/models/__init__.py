"""Several models in one server: each has an engine's process, which is there while the model is used.

settings.py     how much memory they may take together, and when one leaves
source.py       what a model is opened from, and what is known of it before
served_model.py one model: its engine, its routes, and the calls that it has
served_models.py all of them: loading, room for the next one, unloading
dispatcher.py   which model a call names, for how long it should stay, and from the call to its routes
downloads.py    models that are fetched and removed while the server runs
routes.py       the routes that belong to no model, and the numbers of all models
app.py          the application
"""
