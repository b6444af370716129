"""vLLM: splices and edits in the engine that people run in production.

    kvnotes vllm serve MODEL          a server with everything set
    KVNotesConnector                  the plug-in: finds compiled segments in prompts, moves their
                                      keys, puts them into vLLM's cache; compiles new ones
    KVNotesScheduler                  any number of segments at any place of a prompt
    VLLMEngine                        sessions over a running server, stock or with the plug-in

Importing this imports no vLLM: the plug-in runs in the processes of vLLM, the client anywhere.
"""
