from peer_agent.mover.main import main

if __name__ == "__main__":
    main()
