"""An agent with LangGraph: a node asks, an edge checks and leads back to it once."""

from __future__ import annotations

from typing import Any

from agent_main import right, run
from langchain_openai import ChatOpenAI
from langgraph.graph import END, START, MessagesState, StateGraph


def play(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """1 for a right answer, half of it for a second one."""
    model = ChatOpenAI(model="policy", base_url=base_url, api_key=api_key)  # type: ignore[arg-type]

    def ask(state: MessagesState) -> dict[str, Any]:
        return {"messages": [model.invoke(state["messages"])]}

    def object_to(state: MessagesState) -> dict[str, Any]:
        return {"messages": [{"role": "user", "content": "no"}]}

    def next_of(state: MessagesState) -> str:
        is_over = len(state["messages"]) > 2 or right(task, str(state["messages"][-1].content))
        return END if is_over else "object"

    graph = StateGraph(MessagesState)
    graph.add_node("ask", ask)
    graph.add_node("object", object_to)
    graph.add_edge(START, "ask")
    graph.add_conditional_edges("ask", next_of, ["object", END])
    graph.add_edge("object", "ask")
    messages = graph.compile().invoke({"messages": [{"role": "user", "content": task["prompt"]}]})["messages"]
    if not right(task, str(messages[-1].content)):
        return 0.0
    return 1.0 if len(messages) == 2 else 0.5


if __name__ == "__main__":
    run(play)
