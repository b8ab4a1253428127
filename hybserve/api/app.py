"""The ASGI application, put together from its parts."""

from hybserve.api.bridge import Bridge
from hybserve.api.front import Front, table
from hybserve.api.routes import Routes
from hybserve.api.settings import ApiSettings
from hybserve.core.types import ServingFacts
from hybserve.observe.metrics import Metrics


def build_app(facts: ServingFacts, settings: ApiSettings, bridge: Bridge, metrics: Metrics) -> Front:
    routes = Routes(facts, settings, bridge, metrics)
    return Front(table(routes.table()), settings, metrics)
