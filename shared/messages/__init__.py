"""Every message that processes exchange, as a Struct, in one module a channel; nothing else crosses a process's border.

    codec        the encoder and decoder of a channel            msgpack, or JSON
    cards        Instance, ModelCard                             discovery: JSON under a lease
    select       frontend → router: Select → Selected | …        request and reply
                 → all routers: Reserved | Prefilled | Finished  in batches; Reserved only if there are several
                 router → router: ReservationsRequest → …        request, streamed replies
    generate     frontend → worker: Generate → Accepted | …      request and reply
                 frontend → worker: Cancel                       published
    frames       worker → frontend: StepFrame of Parts           published, at most one a step
                 frontend → worker: ResendRequest → Resent       request and reply
    load         worker → everyone: LoadReport                   published every 250 ms
    kv_events    worker → routers: EventBatch                    ZMQ, vLLM's KV events; kvbm has them too
                 router → worker: SnapshotRequest → …            request, streamed replies; kvbm has them too
    kvbm         engine → its kvbm: Attach, Store, Fetch, …      request and reply; the table is in the module
    people       people → router: Explanations, RouterState      request and reply, JSON
                 people → worker: OperateWorker → …              request and reply
    turns        frontend → turns: WantModel → ModelTurn         request and reply
                 people → turns: TurnsState                      request and reply, JSON
    control      anyone → service: Ping, FindNotes, …            request and reply, `control`
    frontends    frontend → frontend: Recall | Forget → …        request, streamed replies
                 frontend → frontend: nothing → RecentRequests   request and reply

Each module ends with the codecs of its channel. Payloads are msgpack, or JSON if the message's `Content-Type` header
says `application/json`. Token ids are packed little-endian u32, hashes are packed little-endian u64
(`shared.hashing`). A time limit is sent as the seconds left. A field is only ever added, and with a default, so that
protocol N can read N-1 and N+1. Select, Generate and kvbm's Fetch of a traced request carry its place in the trace in
the header `traceparent` (`shared.tracing.traceparent`). Names are imported from the module that has them.
"""
