"""What methods share: local training, classifier gradients, features, priors, class draws, schedules, evaluation."""
