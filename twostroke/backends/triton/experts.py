class Mixture:
    pass
