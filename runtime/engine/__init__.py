"""Engine core, its clients and the offline and asynchronous front ends."""
