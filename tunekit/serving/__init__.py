"""Server with the protocol of OpenAI on the generation engine. Requires the extra `serve`."""
