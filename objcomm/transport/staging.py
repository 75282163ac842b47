def accelerator_of(group, backends): return None
def send(lane, ts): return lane.send_all(ts)
def recv(lane, ts): return lane.recv_all(ts)
