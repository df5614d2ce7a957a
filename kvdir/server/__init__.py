"""The coordinator process: config, wiring, services, ticker, HTTP side. All logic is in kvdir.core."""
