def control_of(group): return None
def init_control(group=None): return None
