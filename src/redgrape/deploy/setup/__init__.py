"""Creates, describes and checks the folders of a deployment."""
