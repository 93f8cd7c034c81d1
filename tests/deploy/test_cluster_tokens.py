"""A Ray that answers anybody is no place for a deployment's secret."""

from concurrent.futures import ThreadPoolExecutor

import grpc
import pytest

from deploy.cluster.tokens import ANY_CALL, check_wants_token, refused
from kvferry.errors import ConfigurationError


@pytest.fixture
def control_store():
    """The address of one that answers with this code."""
    servers = []

    def start(code):
        def answer(request, context):
            context.set_code(code)
            return b""

        _, service, method = ANY_CALL.split("/")
        handlers = {method: grpc.unary_unary_rpc_method_handler(answer)}
        server = grpc.server(ThreadPoolExecutor(1))
        server.add_generic_rpc_handlers([grpc.method_handlers_generic_handler(service, handlers)])
        port = server.add_insecure_port("127.0.0.1:0")
        server.start()
        servers.append(server)
        return f"127.0.0.1:{port}"

    yield start
    for server in servers:
        server.stop(None)


def test_one_that_wants_no_token_is_refused_with_what_to_do(control_store):
    address = control_store(grpc.StatusCode.OK)
    with pytest.raises(ConfigurationError, match=rf"the Ray at {address} wants no token: .*get-auth-token.*--open-ray"):
        check_wants_token(address)


def test_one_that_wants_a_token_is_not(control_store):
    check_wants_token(control_store(grpc.StatusCode.UNAUTHENTICATED))


@pytest.mark.parametrize(("mode", "words"), [("token", "may not be the cluster's"), ("", "set RAY_AUTH_MODE=token")])
def test_a_refusal_says_what_this_user_can_do_about_it(monkeypatch, mode, words):
    monkeypatch.setenv("RAY_AUTH_MODE", mode)
    assert words in refused("the Ray cluster at head:6379", "Unauthenticated").message
