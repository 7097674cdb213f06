"""Training and evaluation of the classifiers that `dynamo.semantic` ships."""
