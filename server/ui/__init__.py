"""The Live UI: server-rendered pages over the same queries as the REST interface; nothing is fetched from elsewhere."""
