"""Secure aggregation: a server learns the sum of a cohort's vectors, and none of the vectors.

The protocol is that of Bonawitz et al. 2017 ("Practical Secure Aggregation for Privacy-Preserving Machine Learning")
on the sparse random graph of Bell et al. 2020 ("Secure Single-Server Aggregation with (Poly)Logarithmic Overhead"). A
round has two phases, as the first step of the next one travels with the last of this one:

    prepare   each client draws three secrets and deals shares of them to its neighbours, sealed for each
    mask      it adds to its vector a mask of its own, and one with each neighbour, which that one subtracts
    reveal    of a neighbour that has answered it gives a share of its own mask, of one that has vanished a share of
              the key of its pairwise masks: never both. With `threshold` shares of each the server takes the masks off

A server that lies could tell half of the clients that one has vanished, and the other half that it has not. So what a
client reveals is locked, and its neighbours hold shares of the key, which they give only where they were told that it
has answered. This takes the place of the acknowledgements that Bell et al. sign in two further phases: whose answer
can be opened, of that one `threshold` of its neighbours hold back the other secret.

`cohort` says who is whose neighbour, `party` is a client, and `opening` the server. Nothing here knows what a vector is
of, and nothing is sent: messages are dictionaries that JSON can hold, and tensors.
"""
