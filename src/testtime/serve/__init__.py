"""An HTTP service in which every stream of images has its own adapting network.

    settings, limits     what was asked for; who may ask for what
    decode               bodies of requests to images
    batcher → engine     requests of different streams become one step; at most `slots` streams are resident
    slots, record        which streams are resident; what is known of a stream
    folder, writer       the state folder; states on their way to it
    answers, collapse    predictions as JSON; when a stream has failed
    metrics, events      what is counted and reported
    page, thumbnails     the live page (page.html); pictures for it
    demo                 digits whose light fades, for newcomers
    service, app, server the parts together; the routes; the process
    lease                who may work on a stream, when several processes share a state folder
    replica, ray         one of these processes; several of them on Ray Serve
    router, peers, stored  requests go to the owner of a stream; what all replicas know together
    client               the other side

Threads: the event loop reads requests; one thread, the batcher's, owns the networks; another writes files.
"""
