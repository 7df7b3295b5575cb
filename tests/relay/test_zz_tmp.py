import relay.wire as w
from relay.wire import *
import relay.test_errors as te, pytest
async def bad(self):
    await settle(); self.listener.setblocking(False)
    try: self._keep(Peer(self.listener.accept()[0])); return False
    except BlockingIOError: return True
@pytest.mark.parametrize("t",["test_t7_a_refused_connection_is_a_502","test_t7_a_refused_head_request_has_no_body","test_t7_a_connection_that_takes_too_long_is_a_504"])
async def test_x(monkeypatch,t):
    monkeypatch.setattr(Relay,"unasked",bad)
    await getattr(te,t)()
